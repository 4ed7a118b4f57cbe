"""The version of this package, as `pyproject.toml` says it; folders of results name it.

Not read from the installed metadata: a checkout that is newer than its installation would name the older one.
"""

VERSION = "0.2.0"

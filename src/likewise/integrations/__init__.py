"""Callbacks for training frameworks; each module needs its framework, and nothing here is imported by `likewise`."""

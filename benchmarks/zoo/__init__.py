"""Models of timm, torchvision, transformers and peft, compared with a plain autograd loop.

`zoo.py` beside this folder runs them.
"""

"""Trainers, scikit-learn and samplers; each module needs its framework, and nothing here is imported by `likewise`."""

"""The paper's statistics and a few more, each a few lines on a GramMatrix."""

"""Scripts and styles that the live page and the notebook widget share: pictures, the review queue, the map."""

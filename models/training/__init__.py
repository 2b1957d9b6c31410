"""How the shipped model was trained and evaluated."""

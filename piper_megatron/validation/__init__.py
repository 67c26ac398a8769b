"""Published measurements, and how close the resource model comes to them."""

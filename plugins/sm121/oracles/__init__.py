"""Reference implementations in float64, written from the specifications."""

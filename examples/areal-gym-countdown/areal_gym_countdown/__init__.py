"""An example plugin of areal-gym."""

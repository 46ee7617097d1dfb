"""GPU and interconnect tables, and the hardware of this node."""

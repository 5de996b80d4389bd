"""The node agent: daemon beside the accelerators of one node. It runs snapshot backends on a coordinator's orders."""

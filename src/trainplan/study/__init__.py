"""Studies: what no clock can tell, found by training small models for real."""

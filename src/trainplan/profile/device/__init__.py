"""Devices as data: what one reaches by kind and shape of operator, measured once and read by every estimate."""

"""Published measurements against predictions: how far off are we on machines that nobody here has?"""

"""From a request to a plan: whatever was left open is chosen here, by algorithms that are held against brute force."""

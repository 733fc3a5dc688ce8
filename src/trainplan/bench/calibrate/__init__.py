"""Better constants of a cluster, from runs that were measured on it."""

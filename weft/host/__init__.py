"""This host: its cores, caches and control groups, and the binding of ranks to cores."""

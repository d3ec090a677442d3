"""How ranks are started on a host, what launchers tell them, and reports of how they end."""

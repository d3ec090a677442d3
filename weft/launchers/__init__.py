"""How ranks are started on a host, the variables of launchers, and reports of how ranks end."""

"""How ranks find each other, prove who they are, and connect."""

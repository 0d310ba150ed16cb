"""Names of other packages that notebooks already use."""

"""Who holds which page: the mechanism, without policy."""

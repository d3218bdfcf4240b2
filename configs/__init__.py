"""One file per experiment; each is its record: command, hardware, figures to expect."""

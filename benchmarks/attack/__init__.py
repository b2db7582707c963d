"""A hostile client against one engine that serves honest streams: `make attack`."""

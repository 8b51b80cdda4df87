"""HTTP in, HTTP out: routes, request checks, streams. Imports no torch."""

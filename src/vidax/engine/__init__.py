"""From a request to frames: what is asked for (`request`), and the phases that make it (`engine`)."""

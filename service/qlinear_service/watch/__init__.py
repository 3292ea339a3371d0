"""What a server does now, as one JSON document: made here, shown by the page and `qlinear top`."""

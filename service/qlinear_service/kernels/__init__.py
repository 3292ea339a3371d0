"""The packed layout and the code that multiplies with it: packing, C library, torch reference."""

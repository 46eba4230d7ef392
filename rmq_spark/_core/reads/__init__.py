"""What a reader asks for: options, offsets, and the plan of a read. The source and consumers use it."""

"""Options, offsets and plans of reads, for the source and for consumers."""

"""The sink: sends messages that agree with a local transaction. Four entry points run one protocol (two_phase)."""

"""The sink: messages and a local transaction that agree. One protocol (two_phase) behind four doors."""

"""The vocabulary of the protocol: messages, rows, verdicts, options. It knows no table and no Spark."""

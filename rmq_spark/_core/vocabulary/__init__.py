"""The words of the protocol: messages, rows, verdicts, options. They know no table and no Spark."""

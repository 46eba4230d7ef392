"""Programs that show what rmq_spark does. They lie beside the package, which does not know them."""

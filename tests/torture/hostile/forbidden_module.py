"""Nothing may import this: it is on no allow list."""

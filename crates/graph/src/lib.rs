//! The token graph of an attention mechanism, matrix-free.

//! Weights in files.

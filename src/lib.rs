//! Exact GPU top-k and top-p for Candle.

"""A small codec of our own: mel encoder, residual vector quantiser, inverse-STFT decoder."""

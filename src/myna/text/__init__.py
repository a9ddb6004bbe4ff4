"""Text: normalisation, sentences, spoken forms, word errors."""

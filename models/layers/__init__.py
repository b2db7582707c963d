"""Building blocks shared by decoders and encoders."""

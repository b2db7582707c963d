"""Weight formats of published quantised checkpoints, one file per `quant_method` of config.json's quantization_config."""

"""Sound: wav2vec 2.0, WavLM, w2v-BERT, AST, Whisper."""

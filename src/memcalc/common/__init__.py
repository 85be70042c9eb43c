"""Three small things that every room uses: frozen records, validated fields, escaping of outside text."""

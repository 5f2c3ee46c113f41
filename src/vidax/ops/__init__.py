"""Operations that models share: attention, rotary positions, convolutions. No parameters live here."""

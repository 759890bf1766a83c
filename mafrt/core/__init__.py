"""Ground floor: types, errors, seeding, processes, atomic files, signals. Imports nothing else of mafrt."""

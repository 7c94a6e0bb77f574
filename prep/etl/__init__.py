"""Apply a function of a sample to whole shards: here, in the pods of AIStore's ETL, or in the embedded node."""

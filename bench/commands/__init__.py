"""Commands of ``dali-pipes bench``, one in each file; `options` and `running` hold what they share."""

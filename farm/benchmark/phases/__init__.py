"""The phases of a measurement, one after the other, after its window.

The kind of a subject lists its phases (`farm.benchmark.subjects.base`). The kind of an operator
tuple may add phases to those of all tuples (`farm.subjects.base.Kind.phases`)."""

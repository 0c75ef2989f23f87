"""All tables, as first released."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "model_variant",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("weights", sa.String(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("input_size", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("memory_format", sa.String(), nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("flops", sa.BigInteger(), nullable=False),
        sa.Column("model_flops", sa.BigInteger(), nullable=False),
        sa.Column("bytes_moved", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_variant")),
    )
    with op.batch_alter_table("model_variant", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_model_variant_model"), ["model"], unique=False)

    op.create_table(
        "operator",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("schema_version", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("short_name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("training", sa.Boolean(), nullable=False),
        sa.Column("flops", sa.BigInteger(), nullable=False),
        sa.Column("bytes_moved", sa.BigInteger(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator")),
    )
    with op.batch_alter_table("operator", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_operator_name"), ["name"], unique=False)
        batch_op.create_index(batch_op.f("ix_operator_short_name"), ["short_name"], unique=False)

    op.create_table(
        "protocol",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("launch", sa.String(), nullable=False),
        sa.Column("residency", sa.String(), nullable=False),
        sa.Column("data", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_protocol")),
    )
    op.create_table(
        "significant_operator",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("added_by", sa.String(), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_significant_operator")),
    )
    op.create_table(
        "software",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("torch", sa.String(), nullable=False),
        sa.Column("torchvision", sa.String(), nullable=False),
        sa.Column("cuda", sa.String(), nullable=False),
        sa.Column("cudnn", sa.String(), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("python", sa.String(), nullable=False),
        sa.Column("platform", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_software")),
    )
    op.create_table(
        "card",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("queue", sa.String(), nullable=False),
        sa.Column("software_id", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("state_reason", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.JSON(), nullable=False),
        sa.Column("registered_at_s", sa.Float(), nullable=False),
        sa.Column("last_seen_at_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["software_id"], ["software.id"], name=op.f("fk_card_software_id_software")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_card")),
    )
    with op.batch_alter_table("card", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_card_host"), ["host"], unique=False)
        batch_op.create_index(batch_op.f("ix_card_model"), ["model"], unique=False)

    op.create_table(
        "job",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("variant_id", sa.String(), nullable=True),
        sa.Column("protocol_id", sa.String(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("request_id", sa.String(length=32), nullable=False),
        sa.Column("farm", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.Column("ended_at_s", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["protocol_id"], ["protocol.id"], name=op.f("fk_job_protocol_id_protocol")),
        sa.ForeignKeyConstraint(["variant_id"], ["model_variant.id"], name=op.f("fk_job_variant_id_model_variant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
    )
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_job_request_id"), ["request_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_state"), ["state"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_variant_id"), ["variant_id"], unique=False)

    op.create_table(
        "capture",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("variant_id", sa.String(), nullable=False),
        sa.Column("device_type", sa.String(), nullable=False),
        sa.Column("grad", sa.Boolean(), nullable=False),
        sa.Column("torch", sa.String(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("card_id", sa.String(), nullable=True),
        sa.Column("verification", sa.JSON(), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["card_id"], ["card.id"], name=op.f("fk_capture_card_id_card")),
        sa.ForeignKeyConstraint(["variant_id"], ["model_variant.id"], name=op.f("fk_capture_variant_id_model_variant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_capture")),
        sa.UniqueConstraint(
            "variant_id",
            "device_type",
            "grad",
            "torch",
            "origin",
            name=op.f("uq_capture_variant_id_device_type_grad_torch_origin"),
        ),
    )
    with op.batch_alter_table("capture", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_capture_variant_id"), ["variant_id"], unique=False)

    op.create_table(
        "reading",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("subject_kind", sa.String(), nullable=False),
        sa.Column("subject_id", sa.String(), nullable=False),
        sa.Column("card_id", sa.String(), nullable=False),
        sa.Column("card_model", sa.String(), nullable=False),
        sa.Column("software_id", sa.String(), nullable=False),
        sa.Column("protocol_id", sa.String(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("time_us", sa.Float(), nullable=False),
        sa.Column("time_half_width_us", sa.Float(), nullable=False),
        sa.Column("time_median_us", sa.Float(), nullable=False),
        sa.Column("time_trimmed_us", sa.Float(), nullable=False),
        sa.Column("passes", sa.BigInteger(), nullable=False),
        sa.Column("window_s", sa.Float(), nullable=False),
        sa.Column("warm_up_s", sa.Float(), nullable=False),
        sa.Column("power_w", sa.Float(), nullable=True),
        sa.Column("power_half_width_w", sa.Float(), nullable=True),
        sa.Column("power_source", sa.String(), nullable=False),
        sa.Column("energy_mj", sa.Float(), nullable=True),
        sa.Column("energy_half_width_mj", sa.Float(), nullable=True),
        sa.Column("idle_power_w", sa.Float(), nullable=True),
        sa.Column("base_power_w", sa.Float(), nullable=True),
        sa.Column("sm_clock_mhz", sa.Float(), nullable=True),
        sa.Column("memory_clock_mhz", sa.Float(), nullable=True),
        sa.Column("temperature_c", sa.Float(), nullable=True),
        sa.Column("throttle_reasons", sa.JSON(), nullable=False),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("cost_s", sa.JSON(), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["card_id"], ["card.id"], name=op.f("fk_reading_card_id_card")),
        sa.ForeignKeyConstraint(["protocol_id"], ["protocol.id"], name=op.f("fk_reading_protocol_id_protocol")),
        sa.ForeignKeyConstraint(["software_id"], ["software.id"], name=op.f("fk_reading_software_id_software")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reading")),
    )
    with op.batch_alter_table("reading", schema=None) as batch_op:
        batch_op.create_index(
            "ix_reading_subject", ["subject_id", "card_model", "software_id", "protocol_id"], unique=False
        )

    op.create_table(
        "verdict",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("target", sa.Float(), nullable=False),
        sa.Column("accuracy_time", sa.Float(), nullable=True),
        sa.Column("accuracy_energy", sa.Float(), nullable=True),
        sa.Column("coverage", sa.Float(), nullable=True),
        sa.Column("sum_time_us", sa.Float(), nullable=True),
        sa.Column("whole_time_us", sa.Float(), nullable=True),
        sa.Column("sum_energy_mj", sa.Float(), nullable=True),
        sa.Column("whole_energy_mj", sa.Float(), nullable=True),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_verdict_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verdict")),
        sa.UniqueConstraint("job_id", "round", name=op.f("uq_verdict_job_id_round")),
    )
    op.create_table(
        "call",
        sa.Column("capture_id", sa.Integer(), nullable=False),
        sa.Column("call_index", sa.Integer(), nullable=False),
        sa.Column("module_path", sa.String(), nullable=False),
        sa.Column("operator_id", sa.String(), nullable=False),
        sa.Column("reads", sa.JSON(), nullable=False),
        sa.Column("writes", sa.JSON(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["capture_id"], ["capture.id"], name=op.f("fk_call_capture_id_capture"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["operator_id"], ["operator.id"], name=op.f("fk_call_operator_id_operator")),
        sa.PrimaryKeyConstraint("capture_id", "call_index", name=op.f("pk_call")),
    )
    with op.batch_alter_table("call", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_call_operator_id"), ["operator_id"], unique=False)

    op.create_table(
        "item",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("subject_kind", sa.String(), nullable=False),
        sa.Column("subject_id", sa.String(), nullable=False),
        sa.Column("protocol_id", sa.String(), nullable=False),
        sa.Column("card_id", sa.String(), nullable=False),
        sa.Column("card_model", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("expected_s", sa.Float(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.Column("subject_key", sa.String(), nullable=False),
        sa.Column("claim_key", sa.String(), nullable=True),
        sa.Column("lease_until_s", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("repeated", sa.Integer(), nullable=False),
        sa.Column("reading_id", sa.String(), nullable=True),
        sa.Column("reused", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.Column("published_at_s", sa.Float(), nullable=True),
        sa.Column("started_at_s", sa.Float(), nullable=True),
        sa.Column("ended_at_s", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["card_id"], ["card.id"], name=op.f("fk_item_card_id_card")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_item_job_id_job"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["protocol_id"], ["protocol.id"], name=op.f("fk_item_protocol_id_protocol")),
        sa.ForeignKeyConstraint(["reading_id"], ["reading.id"], name=op.f("fk_item_reading_id_reading")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_item")),
        sa.UniqueConstraint("claim_key", name=op.f("uq_item_claim_key")),
        sa.UniqueConstraint(
            "job_id",
            "subject_kind",
            "subject_id",
            "protocol_id",
            "card_id",
            "role",
            name=op.f("uq_item_job_id_subject_kind_subject_id_protocol_id_card_id_role"),
        ),
    )
    with op.batch_alter_table("item", schema=None) as batch_op:
        batch_op.create_index("ix_item_card_state", ["card_id", "state"], unique=False)
        batch_op.create_index("ix_item_job_round_state", ["job_id", "round", "state"], unique=False)
        batch_op.create_index(batch_op.f("ix_item_reading_id"), ["reading_id"], unique=False)
        batch_op.create_index("ix_item_subject", ["subject_id", "protocol_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_item_subject_key"), ["subject_key"], unique=False)

    op.create_table(
        "job_round",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("operators", sa.JSON(), nullable=False),
        sa.Column("capture_id", sa.Integer(), nullable=True),
        sa.Column("created_at_s", sa.Float(), nullable=False),
        sa.Column("published_at_s", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["capture_id"], ["capture.id"], name=op.f("fk_job_round_capture_id_capture")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_round_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_job_round")),
    )
    op.create_table(
        "trace",
        sa.Column("reading_id", sa.String(), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["reading_id"], ["reading.id"], name=op.f("fk_trace_reading_id_reading"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("reading_id", name=op.f("pk_trace")),
    )
    op.execute(
        """
        CREATE VIEW occurrence AS
        SELECT capture_id, operator_id, count(*) AS calls FROM "call" GROUP BY capture_id, operator_id
        """
    )

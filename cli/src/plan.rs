//! `anymesh plan`: the steps, bytes and bounds of a reshard.

use crate::{
    picture::PictureArgs,
    request::{self, bad},
    server,
};
use anymesh::{
    Error, Mesh, Result, TensorType,
    cost::CostModel,
    meta,
    reshard::{self, Objective},
    show::Show,
};
use clap::Args;
use serde_json::Value;

/// Arguments of `anymesh plan`.
#[derive(Args)]
pub(crate) struct PlanCommand {
    /// Axes and sizes, such as dp=2,tp=4.
    #[arg(long)]
    mesh: Option<String>,
    /// The type before, such as "f32[64@dp, 64]".
    #[arg(long)]
    from: Option<String>,
    /// The type after, such as "f32[64, 64@tp]".
    #[arg(long)]
    to: Option<String>,
    /// The machine: a preset such as h100, or a file such as cost.toml.
    #[arg(long)]
    cost: Option<String>,
    /// What to make small: `bytes` (latency is free) or `time` (the cost model).
    #[arg(long, default_value = "time")]
    objective: String,
    #[command(flatten)]
    picture: PictureArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Answer requests from stdin, one JSON object a line.
    #[arg(long, conflicts_with_all = ["svg", "html"])]
    jsonl: bool,
}

fn objective(text: &str) -> Result<Objective> {
    match text {
        "bytes" => Ok(Objective::Bytes),
        "time" => Ok(Objective::Time),
        _ => Err(Error::Parse {
            what: "objective",
            text: text.into(),
            expected: "bytes or time".into(),
        }),
    }
}

/// One request of `--jsonl`.
pub(crate) fn answer(request: &Value) -> Result<Value> {
    let fields = request::object(
        request,
        "a request",
        &["mesh", "shape", "dtype", "from", "to", "objective"],
    )?;
    let mesh = request::mesh(request::field(fields, "mesh")?, &meta())?;
    let (dtype, shape) = request::dtype_and_shape(fields)?;
    let side = |name: &str| {
        let side = request::field(fields, name)?;
        let side = request::object(side, &format!("'{name}'"), &request::SHARDING)?;
        request::sharding(side, &mesh, shape.rank())
    };
    let (from, to) = (side("from")?, side("to")?);
    let objective = objective(
        fields
            .get("objective")
            .map_or(Some("time"), Value::as_str)
            .ok_or_else(|| bad("'objective' must be bytes or time"))?,
    )?;
    Ok(reshard::plan(&mesh, &shape, dtype, &from, &to, objective)?.to_json())
}

impl PlanCommand {
    pub(crate) fn run(&self) -> Result<()> {
        if self.jsonl {
            return server::serve(answer);
        }
        let (Some(mesh), Some(from), Some(to)) = (&self.mesh, &self.from, &self.to) else {
            return Err(bad(
                "give --mesh, --from and --to, or --jsonl; for example: anymesh plan --mesh dp=2,tp=4 --from \"f32[64@dp,64]\" --to \"f32[64,64@tp]\"",
            ));
        };
        let mut mesh = Mesh::new(mesh, &meta())?;
        if let Some(cost) = &self.cost {
            mesh = mesh.with_cost(CostModel::named(cost)?);
        }
        let (from, to) = (
            TensorType::parse(from, &mesh)?,
            TensorType::parse(to, &mesh)?,
        );
        if (from.dtype, &from.shape) != (to.dtype, &to.shape) {
            return Err(bad(
                "--from and --to must have the same dtype and sizes: a reshard moves data and changes nothing",
            ));
        }
        let plan = reshard::plan(
            &mesh,
            &from.shape,
            from.dtype,
            &from.sharding,
            &to.sharding,
            objective(&self.objective)?,
        )?;
        if self.picture.write(|| vec![plan.figure()])? {
            return Ok(());
        }
        if self.json {
            println!("{}", request::reply(Ok(plan.to_json())));
            return Ok(());
        }
        println!("{plan}");
        Ok(())
    }
}

//! Experts and long sequences in processes, beside other axes: over TCP and as MPI jobs.

use super::*;

/// A mixture of experts with heads enough for two axes.
const EXPERTS: &str = r#"
[model]
model_type = "mixtral"
vocab_size = 257
hidden_size = 32
intermediate_size = 16
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
num_local_experts = 4
num_experts_per_tok = 2
"#;

/// What runs in four processes.
const WAYS: [(&str, &str); 5] = [
    ("dp=2, ep=2", "mesh.zero=1"),
    ("ep=2, tp=2", "mesh.recompute=true"),
    ("cp=2, tp=2", "context.attention=ring"),
    ("ep=2, cp=2", "context.attention=gather"),
    ("pp=2, cp=2", "context.attention=heads"),
];

/// A folder whose model has experts.
fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    let model = CONFIG.split("[model]").next().expect("what is before it");
    let rest = CONFIG.split("[[data]]").nth(1).expect("what is behind it");
    let config = format!("{model}{EXPERTS}\n[[data]]{rest}");
    fs::write(folder.path("run.toml"), config).expect("written");
    folder
}

const SMALL: [&str; 3] = ["batch.global=8", "batch.accumulation=2", "run.steps=3"];

#[test]
fn experts_and_long_sequences_in_processes_give_the_losses_of_simulated_ranks() {
    for (axes, setting) in WAYS {
        let settings = [&SMALL[..], &[setting]].concat();
        assert_processes_equal_ranks(&folder("mix"), &mut launch("4"), axes, &settings);
    }
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "built without MPI")]
fn experts_and_long_sequences_of_an_mpi_job_give_the_losses_of_simulated_ranks() {
    for (axes, setting) in WAYS {
        let settings = [&SMALL[..], &[setting]].concat();
        assert_processes_equal_ranks(&folder("mpi-mix"), &mut mpi("4"), axes, &settings);
    }
}

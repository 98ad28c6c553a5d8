/* The same calls as cluster/benches/exchange.rs, in plain C: MPI_Sendrecv to the next process from the one before, and
   MPI_Allreduce of a sum of floats. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 7 };

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    const size_t sizes[] = {8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
    int me, n;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s], calls = ((size_t)64 << 20) / (bytes + (64 << 10)) + 1;
        float *from = malloc(bytes), *to = malloc(bytes);
        for (size_t i = 0; i < bytes / 4; i++) from[i] = 1.0f + me;
        for (int op = 0; op < 2; op++) {
            double times[ROUNDS];
            for (int round = 0; round <= ROUNDS; round++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double start = MPI_Wtime();
                for (size_t c = 0; c < calls; c++) {
                    if (op == 0)
                        MPI_Sendrecv(from, (int)bytes, MPI_BYTE, (me + 1) % n, 0, to, (int)bytes, MPI_BYTE,
                                     (me + n - 1) % n, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                    else
                        MPI_Allreduce(from, to, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                }
                if (round > 0) times[round - 1] = (MPI_Wtime() - start) / (double)calls;
            }
            qsort(times, ROUNDS, sizeof *times, ascending);
            if (me == 0) printf("%s %zu %.3f\n", op == 0 ? "exchange" : "all_reduce", bytes, times[ROUNDS / 2] * 1e6);
        }
        free(from);
        free(to);
    }
    MPI_Finalize();
    return 0;
}

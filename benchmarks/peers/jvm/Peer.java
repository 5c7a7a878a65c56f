import com.fasterxml.jackson.annotation.JsonIgnoreProperties;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import com.sun.management.OperatingSystemMXBean;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;

/** What both peers read of a commit, and what they report of the way from the first to the last. */
final class Peer {
    static final ObjectMapper JSON = new ObjectMapper();
    private static final OperatingSystemMXBean SYSTEM =
            (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private static final AtomicLong first = new AtomicLong();
    private static final AtomicLong firstCpu = new AtomicLong();

    private Peer() {}

    @JsonIgnoreProperties(ignoreUnknown = true)
    public static class Commit {
        /** None in an opening. */
        public String stream;

        public long version;
        public long seq;
        public Event[] events;

        String account() {
            return stream.substring(stream.indexOf('/') + 1);
        }

        long change() {
            long cents = 0;
            for (Event event : events) {
                if (event.type.equals("MoneyDeposited")) cents += event.data.cents;
                else if (event.type.equals("MoneyWithdrawn")) cents -= event.data.cents;
            }
            return cents;
        }
    }

    @JsonIgnoreProperties(ignoreUnknown = true)
    public static class Event {
        public String type;
        public Data data;
    }

    @JsonIgnoreProperties(ignoreUnknown = true)
    public static class Data {
        public long cents;
    }

    static ObjectReader commits() {
        return JSON.readerFor(Commit.class);
    }

    /** Starts the watch, once. */
    static void begin() {
        if (first.get() == 0 && first.compareAndSet(0, System.nanoTime())) firstCpu.set(SYSTEM.getProcessCpuTime());
    }

    /** The last line of output, as benchmarks/peers/job.py reads it. */
    static void tell(long count, long lastNanos, Map<String, long[]> rows, Map<String, Double> more) throws IOException {
        double seconds = (lastNanos - first.get()) / 1e9;
        double cpu = (SYSTEM.getProcessCpuTime() - firstCpu.get()) / 1e9;
        System.out.println(JSON.writeValueAsString(
                Map.of("count", count, "seconds", seconds, "cpu_s", cpu, "rows", rows, "more", more)));
        System.out.flush();
    }

    /** So that no JVM outlives a benchmark that was killed: it holds the other end of the standard input. */
    static void endWithParent() {
        Thread watch = new Thread(() -> {
            try {
                while (System.in.read() >= 0) {}
            } catch (IOException unreadable) {
                // the parent is gone too
            }
            Runtime.getRuntime().halt(1);
        });
        watch.setDaemon(true);
        watch.start();
    }
}
